//! Modules made by the fake NVRTC, their functions, and launches.
#![expect(unsafe_code, reason = "reads images and kernel arguments through the caller's pointers")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicI32, Ordering::SeqCst},
    },
    time::Duration,
};

use super::memory::{Place, place};
use crate::{
    call::{CallResult, put},
    clock, code,
    config::config,
    counters::STATS,
    emulator,
    failure::fails,
    handles::Handles,
    machine::{Device, current_device, driver_functions, machine, stream},
    nvrtc::Image,
    overhead,
    sync::{complain, lock},
    wrong::is_wrong_kernel,
};

#[derive(Debug)]
struct Module {
    device: usize,
    image: Image,
}

impl Drop for Module {
    fn drop(&mut self) {
        machine().devices[self.device].free_overhead(overhead::MODULE);
    }
}

#[derive(Debug)]
struct Function {
    name: CString,
    device: usize,
    parameters: Vec<usize>,
    max_dynamic_shared: AtomicI32,
    launched: AtomicBool,
}

impl Drop for Function {
    fn drop(&mut self) {
        if self.launched.load(SeqCst) {
            machine().devices[self.device].free_overhead(overhead::KERNEL);
        }
    }
}

static MODULES: LazyLock<Handles<Module>> = LazyLock::new(Handles::default);
static FUNCTIONS: LazyLock<Handles<Function>> = LazyLock::new(Handles::default);

fn load(out: *mut *mut c_void, image: *const c_void) -> CallResult {
    let device = current_device()?.ordinal;
    // SAFETY: the C interface demands a pointer to an image; reading stops at its end mark.
    let image = unsafe { Image::read(image.cast()) }.ok_or(code::INVALID_IMAGE)?;
    if image.sm.is_some_and(|sm| sm != config().sm) {
        return Err(code::NO_BINARY_FOR_GPU);
    }
    if !config().takes_major(config().nvrtc_version.0) {
        return Err(code::INVALID_IMAGE);
    }
    machine().devices[device].take_overhead(overhead::MODULE)?;
    put(out, MODULES.insert(Arc::new(Module { device, image })))
}

fn find_function(module: &Module, name: &CStr) -> Result<Function, c_int> {
    let parameters = emulator::parameter_sizes(name).ok_or(code::NOT_FOUND)?;
    if !module.image.holds(&name.to_string_lossy()) {
        return Err(code::NOT_FOUND);
    }
    let max_dynamic_shared = AtomicI32::new(48 << 10);
    let (name, launched) = (name.to_owned(), AtomicBool::new(false));
    Ok(Function { name, device: module.device, parameters, max_dynamic_shared, launched })
}

struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
}

impl Launch {
    fn check(&self, function: &Function) -> CallResult {
        let threads: u64 = self.block.iter().map(|&size| u64::from(size)).product();
        let possible = (1..=1024).contains(&threads)
            && self.block[2] <= 64
            && self.grid.iter().all(|&size| size > 0)
            && self.grid[0] <= i32::MAX.cast_unsigned()
            && self.grid[1] <= 65535
            && self.grid[2] <= 65535
            && self.shared <= function.max_dynamic_shared.load(SeqCst).cast_unsigned();
        if !possible {
            return Err(code::INVALID_VALUE);
        }
        // The emulator supports only one-dimensional blocks.
        if self.block[1] * self.block[2] == 1 { Ok(()) } else { Err(code::NOT_SUPPORTED) }
    }
}

fn launch(
    function: *mut c_void,
    launch: &Launch,
    handle: *mut c_void,
    arguments: *mut *mut c_void,
) -> CallResult {
    let (function, stream) = (FUNCTIONS.get(function)?, stream(handle)?);
    if function.device != stream.device {
        return Err(code::INVALID_HANDLE);
    }
    launch.check(&function)?;
    if !function.launched.swap(true, SeqCst) {
        machine().devices[stream.device].take_overhead(overhead::KERNEL)?;
    }
    if fails("launch", stream.device) {
        return Err(code::LAUNCH_OUT_OF_RESOURCES);
    }
    if arguments.is_null() && !function.parameters.is_empty() {
        return Err(code::INVALID_VALUE);
    }
    let argument = |(index, &bytes): (usize, &usize)| {
        let mut value = [0; 8];
        let kept = bytes.min(value.len());
        // SAFETY: the array points to an argument for each parameter, of the parameter's size.
        unsafe { value.as_mut_ptr().copy_from((*arguments.add(index)).cast(), kept) };
        u64::from_ne_bytes(value)
    };
    let values: Vec<u64> = function.parameters.iter().enumerate().map(argument).collect();
    STATS.launches.add(1);
    let &Launch { grid, block, shared } = launch;
    let is_wrong = is_wrong_kernel(&function.name.to_string_lossy());
    let reached: Vec<usize> = function.parameters.iter().zip(&values).filter_map(reached).collect();
    stream.push(move |device| {
        let may_reach =
            |&peer: &usize| reach(&machine().devices[device.ordinal], peer, &function.name);
        reached.iter().try_for_each(may_reach)?;
        if fails("kernel", device.ordinal) {
            return Err(code::LAUNCH_FAILED);
        }
        if fails("stall", device.ordinal) {
            // Longer than the deadlines of tests.
            std::thread::sleep(Duration::from_secs(8));
        }
        clock::pass_kernel();
        if config().accounting {
            return Ok(());
        }
        let blocks = grid[0] - u32::from(is_wrong);
        if blocks == 0 {
            return Ok(());
        }
        emulator::run(&function.name, [blocks, grid[1], grid[2]], block[0], shared, values)
            .map_err(|()| code::LAUNCH_FAILED)
    });
    Ok(())
}

/// The device whose memory an argument points to.
fn reached((&bytes, &value): (&usize, &u64)) -> Option<usize> {
    match place(value as usize, 1) {
        Place::Device(device) if bytes == size_of::<u64>() => Some(device),
        _ => None,
    }
}

/// Refuses a kernel whose argument points to another device's memory without peer access.
fn reach(device: &Device, peer: usize, kernel: &CStr) -> CallResult {
    if peer == device.ordinal || lock(&device.peers).contains(&peer) {
        return Ok(());
    }
    let own = device.ordinal;
    complain(&format!(
        "kernel {kernel:?} of device {own} reaches the memory of device {peer}, to which it has no peer access"
    ));
    Err(code::ILLEGAL_ADDRESS)
}

driver_functions! {
    fn cuModuleLoadData(out: *mut *mut c_void, image: *const c_void) {
        load(out, image)
    }

    fn cuModuleLoadDataEx(
        out: *mut *mut c_void,
        image: *const c_void,
        _count: c_uint,
        _options: *mut c_int,
        _values: *mut *mut c_void,
    ) {
        load(out, image)
    }

    fn cuModuleLoad(out: *mut *mut c_void, path: *const c_char) {
        if path.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null; the C interface demands a string that ends in 0.
        let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
        let mut bytes = std::fs::read(path).map_err(|_| code::FILE_NOT_FOUND)?;
        bytes.push(0);
        load(out, bytes.as_ptr().cast())
    }

    fn cuModuleUnload(handle: *mut c_void) {
        MODULES.remove(handle).map(drop)
    }

    fn cuModuleGetFunction(out: *mut *mut c_void, handle: *mut c_void, name: *const c_char) {
        let module = MODULES.get(handle)?;
        if name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null; the C interface demands a string that ends in 0.
        let function = find_function(&module, unsafe { CStr::from_ptr(name) })?;
        put(out, FUNCTIONS.insert(Arc::new(function)))
    }

    fn cuModuleGetGlobal_v2(_out: *mut u64, _bytes: *mut usize, _module: *mut c_void, _name: *const c_char) {
        Err(code::NOT_FOUND)
    }

    /// The loading mode; 1 is eager.
    fn cuModuleGetLoadingMode(out: *mut c_int) {
        put(out, 1)
    }

    fn cuFuncSetAttribute(handle: *mut c_void, attribute: c_int, value: c_int) {
        let function = FUNCTIONS.get(handle)?;
        match attribute {
            8 if (0..=config().shared_memory_optin()).contains(&value) => {
                function.max_dynamic_shared.store(value, SeqCst);
                Ok(())
            }
            9 if (-1..=100).contains(&value) => Ok(()),
            _ => Err(code::INVALID_VALUE),
        }
    }

    fn cuFuncGetAttribute(out: *mut c_int, attribute: c_int, handle: *mut c_void) {
        let function = FUNCTIONS.get(handle)?;
        put(out, match attribute {
            0 => 1024,
            4 => 32,
            5 | 6 => config().sm,
            8 => function.max_dynamic_shared.load(SeqCst),
            _ => 0,
        })
    }

    fn cuFuncSetCacheConfig(handle: *mut c_void, _config: c_int) {
        FUNCTIONS.get(handle).map(drop)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out: *mut c_int,
        handle: *mut c_void,
        block: c_int,
        _shared: usize,
    ) {
        FUNCTIONS.get(handle)?;
        if block <= 0 { Err(code::INVALID_VALUE) } else { put(out, (2048 / block).min(32)) }
    }

    fn cuLaunchKernel(
        function: *mut c_void,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        handle: *mut c_void,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        if !extra.is_null() {
            return Err(code::NOT_SUPPORTED);
        }
        let shape = Launch {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared,
        };
        launch(function, &shape, handle, arguments)
    }
}
