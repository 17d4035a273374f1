"""What the model families share: small layers, scanning of stacked layers, and Hugging Face folders."""
