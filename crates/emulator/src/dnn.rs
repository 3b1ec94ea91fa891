//! cuDNN: descriptors, and plans that need no workspace of their own.


use crate::ffi::{create, text};

create! {
    fn cudnnCreate;
    fn cudnnCreateActivationDescriptor;
    fn cudnnCreateCTCLossDescriptor;
    fn cudnnCreateConvolutionDescriptor;
    fn cudnnCreateDropoutDescriptor;
    fn cudnnCreateFilterDescriptor;
    fn cudnnCreatePoolingDescriptor;
    fn cudnnCreateRNNDataDescriptor;
    fn cudnnCreateRNNDescriptor;
    fn cudnnCreateSpatialTransformerDescriptor;
    fn cudnnCreateTensorDescriptor;
}

text! {
    fn cudnnGetErrorString => c"CUDNN_STATUS_SUCCESS";
}
