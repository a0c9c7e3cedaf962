"""Doors to other programs: repositories of the hub, files of llama.cpp."""
