"""
Benchmarks: `python -m ops.bench NAME [--quick] [--seed N] [--json]`.

Each compares with a baseline of the same run and says which acceptance lines hold.
"""
