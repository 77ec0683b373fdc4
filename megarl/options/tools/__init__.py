"""Tools that a chat may call: the functions, the calls in a response, and the processes that run them."""
