"""What detection and segmentation share: a backbone that gives the features of four stages, files, cost, drawing."""
