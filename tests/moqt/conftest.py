"""How hypothesis runs here: a machine that is busy with something else is no failure."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
