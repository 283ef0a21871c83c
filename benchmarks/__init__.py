"""Programs that time FiveTune against its peers: same work, interleaved, one run, a ratio."""
