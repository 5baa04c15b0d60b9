"""The crash harness: kills workloads, cuts their power and fills their disks, and examines the remains each time."""
