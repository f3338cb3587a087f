//! Macros that declare a key of a config once: documentation, type, range, default, and the effect
//! of a change on `--resume`.

/// Declares a section: a struct with a field for each key, and a function that reads the keys in this order.
/// The declaration of a key consists of
/// - its documentation, one paragraph, which `onebox config keys` prints too;
/// - its name, and the type of its value;
/// - the method of [`Section`](super::reading::Section) that reads it, with range and default; they may
///   use the keys above, the arguments of `read`, and each `let` above;
/// - its [`ResumeEffect`](super::ResumeEffect); a section and a key of a box have none.
macro_rules! section {
    (
        $(#[$attribute:meta])*
        pub struct $Section:ident, read($section:ident $(, $context:ident: $Context:ty)*) {
            $(
                $(let $name:ident = $value:expr;)*
                $(#[doc = $doc:literal])+
                $(#[serde($($serde:tt)*)])?
                $key:ident: $Key:ty = $read:ident($($arguments:tt)*) $(, resume: $effect:ident)?;
            )+
        }
    ) => {
        $(#[$attribute])*
        pub struct $Section {
            $(
                $(#[doc = $doc])+
                $(#[serde($($serde)*)])?
                pub $key: $Key,
            )+
        }

        impl $Section {
            /// Reads every key.
            pub(super) fn read(
                $section: &mut $crate::reading::Section<'_, '_>
                $(, $context: $Context)*
            ) -> Self {
                $(
                    $(let $name = $value;)*
                    let declaration = $crate::declare::declaration!(
                        $key, $($doc)+ $(, $effect)?
                    );
                    let $key: $Key = $section.$read(declaration, $($arguments)*);
                )+
                Self { $($key),+ }
            }
        }
    };
}

/// Declares an enum with the values of a key as its variants. A variant with its own keys shows an
/// example of them in brackets. These keys are declared as in a section. Without a
/// [`ResumeEffect`](super::ResumeEffect) they have the effect of the key that holds the enum.
macro_rules! choice {
    (
        $(#[$attribute:meta])*
        pub enum $Choice:ident $(, read($context:ident: $Context:ty))? {
            $(
                $(#[$variant_attribute:meta])*
                $Variant:ident $([$example:literal])? $({
                    $(let $name:ident = $value:expr;)*
                    $(
                        $(#[doc = $doc:literal])+
                        $(#[serde($($serde:tt)*)])?
                        $key:ident: $Key:ty = $read:ident($($arguments:tt)*) $(, resume: $effect:ident)?;
                    )+
                })?
            ),+ $(,)?
        }
    ) => {
        $(#[$attribute])*
        pub enum $Choice {
            $(
                $(#[$variant_attribute])*
                $Variant $({
                    $(
                        $(#[doc = $doc])+
                        $(#[serde($($serde)*)])?
                        $key: $Key,
                    )+
                })?
            ),+
        }

        impl $crate::reading::Choice for $Choice {
            type Context = $crate::declare::context!($($Context)?);
            const EXAMPLES: &'static [&'static str] =
                &[$(concat!(stringify!($Variant) $(, $example)?)),+];

            fn name(&self) -> &'static str {
                match self {
                    $(Self::$Variant { .. } => stringify!($Variant)),+
                }
            }

            fn read(
                variant: &str,
                _section: &mut $crate::reading::Section<'_, '_>,
                _context: Self::Context,
            ) -> Self {
                $(let $context: $Context = _context;)?
                $(
                    if variant == stringify!($Variant) {
                        $(
                            $(let $name = $value;)*
                            $(
                                let declaration = $crate::declare::declaration!(
                                    $key, $($doc)+ $(, $effect)?
                                );
                                let $key: $Key = _section.$read(declaration, $($arguments)*);
                            )+
                        )?
                        return Self::$Variant $({ $($key),+ })?;
                    }
                )+
                unreachable!("`{variant}` is none of {:?}", Self::EXAMPLES)
            }
        }
    };
}

/// Declaration of a key, without its value.
macro_rules! declaration {
    ($key:ident, $($doc:literal)+ $(, $effect:ident)?) => {
        $crate::reading::Declaration::new(stringify!($key), concat!($($doc),+))
            $(.resume($crate::ResumeEffect::$effect))?
    };
}

/// Type of a choice's context.
macro_rules! context {
    () => {
        ()
    };
    ($Context:ty) => {
        $Context
    };
}

pub(super) use {choice, context, declaration, section};
