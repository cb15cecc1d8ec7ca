"""Wire contracts: frozen msgspec structs, the project's nouns. Pure; `solver` may import them."""
