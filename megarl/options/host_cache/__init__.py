"""Keys and values of prompts in main memory, behind the cache on GPUs: SGLang's hierarchical cache."""
