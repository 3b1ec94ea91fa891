//! cuDNN: descriptors, and plans that need no workspace of their own.
//!
//! PyTorch's attention and convolutions speak to cuDNN's graph interface, whose descriptors are bags of
//! attributes. One engine answers every graph. What the real engines would ask for as workspace is not public,
//! so a plan asks for nothing; workspaces that cuDNN's front end adds by itself (the attention backward's fp32
//! accumulator and row sums) are PyTorch's own and appear as on a device.

use std::ffi::c_int;

use crate::ffi::{Handle, Out, SUCCESS, create, no_bytes, text};

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

// SAFETY of every `no_mangle` below: each name is cuDNN's own, is exported once, and has the parameters of
// its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cudnnGetLastErrorString(message: Out<u8>, length: usize) {
    if length > 0 {
        message.set(0);
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendCreateDescriptor(_kind: c_int, out: Out<Handle>) -> c_int {
    out.set(crate::ffi::new_handle());
    SUCCESS
}

/// `CUDNN_ATTR_ENGINEHEUR_RESULTS`: the engine configurations that fit a graph.
const ENGINE_CONFIGURATIONS: c_int = 202;
/// `CUDNN_ATTR_ENGINECFG_ENGINE`.
const ENGINE: c_int = 300;
/// `CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE` and `CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE`.
const CONFIGURATION_WORKSPACE: c_int = 303;
const PLAN_WORKSPACE: c_int = 402;
/// `CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED`, 32 bits wide.
const SHARED_MEMORY: c_int = 304;
/// `CUDNN_ATTR_ENGINE_GLOBAL_INDEX`.
const ENGINE_INDEX: c_int = 1301;

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendGetAttribute(
    _descriptor: Handle,
    attribute: c_int,
    _kind: c_int,
    wanted: i64,
    count: Out<i64>,
    values: Out<i64>,
) -> c_int {
    match attribute {
        // The caller's array already holds the descriptors that would be filled.
        ENGINE_CONFIGURATIONS | ENGINE => count.set(1),
        ENGINE_INDEX | CONFIGURATION_WORKSPACE | PLAN_WORKSPACE | SHARED_MEMORY => {
            count.set(1);
            if wanted > 0 {
                let width = if attribute == SHARED_MEMORY { 4 } else { 8 };
                values.bytes().fill(0, &[0; 8][..width]);
            }
        }
        // Notes, knobs and descriptions: none.
        _ => count.set(0),
    }
    SUCCESS
}

no_bytes! {
    fn cudnnDropoutGetStatesSize(_) -> usize;
    fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_ _ _ _ _ _ _ _) -> usize;
    fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(_ _ _ _ _ _ _ _ _ _) -> usize;
    fn cudnnGetBatchNormalizationTrainingExReserveSpaceSize(_ _ _ _ _) -> usize;
    fn cudnnGetConvolutionForwardWorkspaceSize(_ _ _ _ _ _) -> usize;
    fn cudnnGetConvolutionBackwardDataWorkspaceSize(_ _ _ _ _ _) -> usize;
    fn cudnnGetConvolutionBackwardFilterWorkspaceSize(_ _ _ _ _ _) -> usize;
    fn cudnnGetCTCLossWorkspaceSize(_ _ _ _ _ _ _ _) -> usize;
    fn cudnnGetCTCLossWorkspaceSize_v8(_ _ _ _ _) -> usize;
    fn cudnnGetRNNTempSpaceSizes(_ _ _ _) -> usize, usize;
}
