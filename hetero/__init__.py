"""hetero: post-train Mixture-of-Experts language models on one box."""
