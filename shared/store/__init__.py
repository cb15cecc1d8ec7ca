"""
The store: what outlives a connection, in one relational schema and a folder of file bodies.

SQLite serves one host, PostgreSQL several. The mesh itself needs no store: a service that cannot
reach it serves everything else. `ops/docs/store.md` describes the schema, migrations and crashes.
"""
