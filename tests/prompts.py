"""Ten prompts of three kinds: code, arithmetic, conversation."""

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "def is_palindrome(s):\n    # complete this function",
    "What does the SQL statement SELECT COUNT(*) FROM users do?",
    "Tom has 3 boxes with 12 apples each. He gives away 7 apples. How many are left?",
    "A train travels 60 km in 45 minutes. What is its speed in km per hour?",
    "If x + 5 = 12, what is x?",
    "Explain in two sentences why the sky is blue.",
    "Give me three ideas for a birthday present for my mother.",
    "Who wrote Romeo and Juliet, and when?",
    "Write a short poem about autumn leaves.",
]
