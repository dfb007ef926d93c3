"""Many architectures."""
