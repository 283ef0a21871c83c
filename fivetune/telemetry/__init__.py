"""What the machine is and does, what the seconds of a run go into, and what limits it."""
