// The handler of `launch.c` for programs on the CPU: the same code, given a stream, which XLA has only on a GPU.
//
// The ordinal of the device is that of XLA, or with $FAKE_DEVICES the number of the calling thread modulo that. $FAKE_SHIFT is added to the
// address of the first operand.
#include "launch.c"

#define PUBLIC __attribute__((visibility("default")))

static atomic_int threads;
static __thread int thread;

static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = (void*)0x5eed;
  return NULL;
}

static XLA_FFI_Error* get_ordinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  if (!thread) thread = atomic_fetch_add(&threads, 1) + 1;
  args->device_ordinal = (thread - 1) % atoi(getenv("FAKE_DEVICES"));
  return NULL;
}

static XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame, XLA_FFI_ExecutionStage stage) {
  if (frame->extension_start) return jaxrnn_launch_v1(frame);
  XLA_FFI_Api api = *frame->api;
  XLA_FFI_CallFrame copy = *frame;
  api.XLA_FFI_Stream_Get = get_stream;
  if (getenv("FAKE_DEVICES")) api.XLA_FFI_DeviceOrdinal_Get = get_ordinal;
  copy.api = &api, copy.stage = stage;
  if (getenv("FAKE_SHIFT") && stage == XLA_FFI_ExecutionStage_EXECUTE) {
    XLA_FFI_Buffer* buffer = frame->args.args[0];
    buffer->data = (char*)buffer->data + atoi(getenv("FAKE_SHIFT"));
  }
  return jaxrnn_launch_v1(&copy);
}

PUBLIC XLA_FFI_Error* host_instantiate(XLA_FFI_CallFrame* frame) {
  return handle(frame, XLA_FFI_ExecutionStage_INSTANTIATE);
}
PUBLIC XLA_FFI_Error* host_execute(XLA_FFI_CallFrame* frame) { return handle(frame, XLA_FFI_ExecutionStage_EXECUTE); }
PUBLIC XLA_FFI_Error* host_initialize(XLA_FFI_CallFrame* frame) {
  return handle(frame, XLA_FFI_ExecutionStage_INITIALIZE);
}

// Returns the traits that XLA reads when the handler is registered.
PUBLIC int traits_of_handler(void) {
  XLA_FFI_Metadata metadata = {.struct_size = XLA_FFI_Metadata_STRUCT_SIZE};
  XLA_FFI_Metadata_Extension extension = {.metadata = &metadata};
  ((Extension*)&extension)->type = XLA_FFI_Extension_Metadata;
  XLA_FFI_CallFrame frame = {.extension_start = (Extension*)&extension};
  XLA_FFI_Error* failure = jaxrnn_launch_v1(&frame);
  return failure ? -1 : (int)metadata.traits * 100 + metadata.api_version.minor_version;
}
