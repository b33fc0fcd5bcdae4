"""How the parts run together: settings, start, publishing, recovery, and `Run`, with which recipes are written."""
