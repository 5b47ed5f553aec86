"""How hypothesis runs here: without its limit of 0.2 s for an example, which a machine that others use does not keep."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
