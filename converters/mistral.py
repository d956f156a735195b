"""Names of the Mistral family: Llama's, letter for letter."""

from spmoe_lite.converters.llama import dense_names as dense_names
