"""What kvguard says about itself: Prometheus metrics and the structured log."""
