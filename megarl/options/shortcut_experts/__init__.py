"""LongCat-Flash: layers of two attentions and two MLPs, and a mixture beside the first that is added behind the second."""
