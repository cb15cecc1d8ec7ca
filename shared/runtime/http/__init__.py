"""Parts of HTTP servers of all services."""
