"""Injected faults for `rft.checkpoint`: a toy job in forked processes, disks that misbehave, and
two judges of what is left.
"""
