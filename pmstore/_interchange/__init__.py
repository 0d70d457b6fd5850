"""Import and export of other formats: npz, safetensors, zarr, HDF5. docs/interchange.md describes what each keeps."""
