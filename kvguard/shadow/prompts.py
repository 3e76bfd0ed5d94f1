"""Short prompts of our own for the self-check at start: they are public, so nothing of a user's is in them."""

SELF_CHECK = (
    "What is the capital of France, and what river runs through it?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "List five unusual uses of a paperclip.",
    "Give me a simple recipe for pancakes with quantities.",
    "Who wrote Hamlet, and what is the play about?",
    "Count from one to twenty in words.",
    "Describe how a bicycle stays upright.",
    "Translate 'good morning, how are you?' into Spanish and French.",
    "Write a Python function that reverses a list without using slicing.",
    "What happened in the year 1969 that people still talk about?",
    "Compare cats and dogs as pets in three sentences.",
)
