"""What the machine does: telemetry while a run computes, and what a profiler recorded."""
