"""The Colibri daemon."""
