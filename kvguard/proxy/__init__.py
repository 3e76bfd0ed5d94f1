"""The data plane, which relays every byte between client and engine, and the management port beside it."""
