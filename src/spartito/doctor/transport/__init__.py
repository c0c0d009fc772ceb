"""How the doctors of a cluster exchange messages: connections, messages, a server."""
