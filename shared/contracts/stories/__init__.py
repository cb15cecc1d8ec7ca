"""Records of finished requests, from which operators see why a request was late."""
