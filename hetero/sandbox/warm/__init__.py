"""What a warm interpreter runs: standard library and the launcher's modules, for any Python from 3.10 on."""
