"""A script that trains nothing."""

print("no training here")
