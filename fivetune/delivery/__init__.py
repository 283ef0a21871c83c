"""How users get a finished model: exports, the server, the hub."""
