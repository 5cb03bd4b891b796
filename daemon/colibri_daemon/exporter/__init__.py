"""The metrics process: reads every process's numbers from shared memory and serves them to Prometheus. Nothing waits
for it, and it asks nobody: a scrape costs the daemon's other processes nothing."""
