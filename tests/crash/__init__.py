"""The crash harness: workloads are killed, lose power and fill their disks, and what is left each time is examined."""
