"""Models that are made without values first, on torch's meta device."""
