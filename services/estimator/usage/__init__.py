"""Usage of tenants: counted from confirmed finals, kept in files, and published."""
