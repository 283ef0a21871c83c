"""What the machine is and does: devices.py."""
