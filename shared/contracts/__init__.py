"""Wire contracts: frozen msgspec structs. Pure code; `solver` may import them."""
