"""Features that not every run needs: each has its page of docs, and the core never imports it."""
