"""The result of a run for other programs: repositories of the hub, their model card, files of llama.cpp."""
