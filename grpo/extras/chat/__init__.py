"""Questions to a trained policy, one or in a conversation, and adapters that a conversation switches between."""
