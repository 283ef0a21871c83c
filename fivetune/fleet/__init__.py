"""Many runs and many machines: sweeps and searches, clusters, estimates of memory."""
