"""
Benchmarks: `python -m ops.bench NAME [--quick] [--seed N] [--json]`.

Each benchmark compares with a baseline of the same run and reports which acceptance lines hold.
"""
