"""What the commands of ``spartito data`` do beside packing: look, check, measure, fetch."""
