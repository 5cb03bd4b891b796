"""What the daemon's processes share. Imports neither the engine nor any one process's package."""
