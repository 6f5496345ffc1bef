"""Hydra launchers: thin plugins over the underscore modules that do the work."""
