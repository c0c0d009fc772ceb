"""Groups of replicas that train apart, and meet now and then."""
