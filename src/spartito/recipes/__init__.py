"""Short scripts that train a known model on known data; copy one to start your own."""
