"""The 16-bit reference: one exact pass inside the engine, or a 16-bit engine beside it."""
