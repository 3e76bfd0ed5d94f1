"""Settings of every test. Being here also puts this folder on the import path, for the helpers beside it."""

from hypothesis import settings

# A shared machine pauses now and then; a deadline for each example would only make tests flicker.
settings.register_profile("kvguard", deadline=None)
settings.load_profile("kvguard")
