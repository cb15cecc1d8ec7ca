"""Rules that assign groups to virtual queues one after another: FCFS, EDF."""
