"""Do to a job what machines and networks do to it, and judge how it ends."""
